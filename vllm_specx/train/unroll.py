"""EAGLE drafts from many positions of known text at once: EAGLE-3's training-time test.

Decoding from position i, the draft reads keys made from the target's states up to i, and then the keys
of its own steps. Here every row decodes so from its own position: in step j, row i attends to the keys
of step 0 up to i and to its own of steps 1 to j, at rotary position i + j (arXiv 2503.01840, figure 6).
Rows that need no further step are dropped, and text that nothing is drafted from gives keys only.
"""

from __future__ import annotations

import torch

from vllm_specx.train.eagle_net import EagleNet


class Unroll:
    """Call start() once, then step() for each further token."""

    def __init__(
        self,
        net: EagleNet,
        states: torch.Tensor,
        following: torch.Tensor,
        lengths: list[int],
    ) -> None:
        """states: [T, ...] the target's states of texts end to end, each from its beginning on;
        following: [T, hidden] embeddings of the tokens after; lengths: tokens of each text."""
        self._net, self._lengths = net, lengths
        device = states.device
        sizes = torch.tensor(lengths, device=device)
        self._begins = sizes.cumsum(0) - sizes
        self._position = torch.cat([torch.arange(n, device=device) for n in lengths])
        self._read, self._residual = net.enter(following, net.feature(states))
        keys = net.rotate(net.layer.heads(self._read, "k_proj"), self._position)
        values = net.layer.heads(self._read, "v_proj")
        self._keys, self._values = torch.split(keys, lengths), torch.split(values, lengths)
        self._own_keys: list[torch.Tensor] = []
        self._own_values: list[torch.Tensor] = []

    def start(self, rows: torch.Tensor) -> torch.Tensor:
        """Draft from `rows`, int64 [n] ascending; the layer's output [n, hidden]."""
        self._rows, self._steps = rows, 0
        return self._layer(self._read[rows], self._residual[rows])

    def keep(self, kept: torch.Tensor) -> None:
        """Go on with those rows only for which bool [n] is true."""
        self._rows = self._rows[kept]
        self._own_keys = [keys[kept] for keys in self._own_keys]
        self._own_values = [values[kept] for values in self._own_values]

    def step(self, feature: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """feature [n, hidden]: the layer's last output; embedding [n, hidden] of the token drafted
        with it. The layer's next output [n, hidden]."""
        self._steps += 1
        read, residual = self._net.enter(embedding, feature)
        at = self._position[self._rows] + self._steps
        self._own_keys.append(self._net.rotate(self._net.layer.heads(read, "k_proj"), at))
        self._own_values.append(self._net.layer.heads(read, "v_proj"))
        return self._layer(read, residual)

    def _layer(self, read: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        layer = self._net.layer
        queries = self._net.rotate(
            layer.heads(read, "q_proj"), self._position[self._rows] + self._steps
        )
        return layer.finish(residual, self._attend(queries))

    def _attend(self, queries: torch.Tensor) -> torch.Tensor:
        """queries [n, heads, dim] -> [n, heads * dim]."""
        count, heads, dim = queries.shape
        kv = self._keys[0].shape[1]
        queries = queries.view(count, kv, heads // kv, dim) * dim**-0.5
        own = [torch.einsum("nkgd,nkd->nkg", queries, keys) for keys in self._own_keys]
        texts = torch.searchsorted(self._begins, self._rows, right=True) - 1
        counts = torch.bincount(texts, minlength=len(self._lengths)).tolist()
        local = torch.split(self._position[self._rows], counts)
        own_scores = torch.split(torch.stack(own, -1), counts) if own else None
        found, shares = [], []
        for text, part in enumerate(torch.split(queries, counts)):
            if not len(part):
                continue
            reach = int(local[text][-1]) + 1
            keys, values = (x[text][:reach].transpose(0, 1) for x in (self._keys, self._values))
            scores = part.transpose(0, 1).flatten(1, 2) @ keys.transpose(1, 2)
            scores = scores.view(kv, len(part), -1, reach).float()
            hidden = torch.arange(reach, device=scores.device) > local[text][:, None]
            scores = scores.masked_fill(hidden[:, None], float("-inf"))
            if own_scores is not None:
                mine = own_scores[text].transpose(0, 1).float()
                scores = torch.cat((scores, mine), -1)
            weights = scores.softmax(-1).to(values.dtype)
            seen = (weights[..., :reach].flatten(1, 2) @ values).view(kv, len(part), -1, dim)
            found.append(seen.transpose(0, 1))
            shares.append(weights[..., reach:].transpose(0, 1))
        attended = torch.cat(found)
        if own:
            share = torch.cat(shares)
            for step, values in enumerate(self._own_values):
                attended = attended + share[..., step, None] * values[:, :, None]
        return attended.flatten(1)
