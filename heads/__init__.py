"""The heads room: draft heads as ``nn.Module`` classes, their training and their checkpoints.

It knows neither the engine nor HTTP: what it needs of a model it is given as tensors and callables. The class that is
trained is the class that is served. Methods that need trained weights live here; the training-free ``suffix`` drafter
lives in ``engine/spec_decode``.
"""
