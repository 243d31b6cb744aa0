"""Linear layers in float32 on AMD's processors, where MKL leaves half of the machine unused for a step's few tokens.

One thread of an EPYC (AVX-512), torch 2.13 with MKL 2024.2, GB/s of weights read (thread time, best of 15):

    weights           tokens    x @ W.T    W @ x.T    W in pieces
    576 x 576              1        9.4       16.7                   as two tokens: the product with one is no faster
    1536 x 576             2        5.5       18.3
    576 x 576              4        8.1       13.7
    2048 x 8192            4        8.1        5.6                   the input no longer fits beside the weights
    49152 x 576            8        5.2                       6.7
    49152 x 2048           8        4.7                       8.2

Weights are read where they lie; nothing is packed or kept, so a sleep finds all of them in their pool.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

_INPUT_FLOATS = 3584  # rows times width up to which W @ x.T wins: the input stays in the first-level cache
_PIECE = 1024  # rows of a wide W that are multiplied at a time


class FewTokensLinear(nn.Linear):
    """``nn.Linear`` by products that are fast for few tokens. Equal up to the order of additions."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // self.in_features
        if max(rows, 2) * self.in_features <= _INPUT_FLOATS and rows:
            return self._by_columns(input.reshape(rows, self.in_features)).view(*input.shape[:-1], self.out_features)
        if self.out_features < 2 * _PIECE:
            return linear(input, self.weight, self.bias)
        pieces = torch.cat([linear(input, piece) for piece in torch.split(self.weight, _PIECE)], dim=-1)
        return pieces if self.bias is None else pieces.add_(self.bias)

    def _by_columns(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [rows, in] -> [rows, out], both contiguous."""
        rows = len(tokens)
        columns = torch.mm(self.weight, (torch.cat((tokens, tokens)) if rows == 1 else tokens).t())
        result = columns[:, :rows].t().contiguous()
        return result if self.bias is None else result.add_(self.bias)


def use_few_tokens_linear(model: Any) -> None:
    """Let every plain ``nn.Linear`` of ``model`` compute this way. Parameters and names stay what they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewTokensLinear
