"""The server room: HTTP, JSON, SSE, text, tokenizer, chat template, auth, metrics and the command line.

It talks to the engine through ``engine.async_engine`` in token ids and small messages; it does not know torch, tensors
or KV blocks, and never imports ``heads``.
"""
