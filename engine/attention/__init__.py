"""Paged attention: the KV pool's tensors, a step's segments, and the function registered with transformers."""
