"""The engine room: requests as token ids in, verified token ids out.

It knows the scheduler, KV blocks, the model, sampling, drafting and verification. It does not know FastAPI, text,
JSON or Prometheus; the server room above it speaks those. Imports run one way: ``server -> engine -> heads``.

The modules that the server imports before a model is loaded (``config``, ``sampling_params``, ``outputs``,
``errors``, ``threads``) do not import torch, so that ``headlong --help`` and a refused configuration answer at once.
"""
