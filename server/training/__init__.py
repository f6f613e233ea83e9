"""Prompts for training draft heads: the built-in recipe, users' files, and keeping benchmarks out of them."""
