"""Kernels over paged KV in Triton. Importing a module of this package needs triton; nothing outside ``triton_backend`` does.

All take a layer's cache as [2, blocks, block_size, kv heads, head_dim] with any strides but 1 for the last, and never read what
lies outside a sequence: neither table entries beyond its blocks nor slots beyond its length.
"""
