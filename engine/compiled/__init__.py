"""One step of a Llama-family model as compiled code: every row of every request in one call, int8 or float32.

``build`` compiles ``source/`` once into the cache, ``library`` is its C interface, ``weights`` packs a transformers
model's weights for it, ``runner`` turns batches into calls and holds the KV cache, ``heads`` computes draft
heads. A row's result depends, bit for bit, on nothing but the row: not on its neighbours, the threads, or how its
prompt was cut.
"""
