"""From what the user names (folder, GGUF file, hub id, installed package) to a model in memory, or one clear refusal.

``source`` finds the files, ``digest`` identifies them, ``gguf`` converts a GGUF once into the cache (``cache``),
``weights`` reads safetensors headers, ``checks`` and ``memory`` refuse what cannot be served before anything is
allocated, ``model`` puts it together.
"""

from engine.loading.model import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
