"""Public implementations to agree with whose import warns (they script functions, which torch has deprecated)."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from rotary_embedding_torch import RotaryEmbedding, apply_rotary_emb
    from x_transformers.x_transformers import AlibiPositionalBias

__all__ = ["AlibiPositionalBias", "RotaryEmbedding", "apply_rotary_emb"]
