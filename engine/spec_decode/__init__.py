"""Speculative decoding: drafters propose a tree, the controller sizes it, the verifier walks it."""
