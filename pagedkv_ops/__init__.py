"""Paged KV-cache ops for PyTorch: importing this package registers ``torch.ops.pagedkv.*``."""
