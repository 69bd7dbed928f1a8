"""Experts are chosen and summed as the definition says."""

import pytest
import torch
import torch.nn.functional as F

from minisgl.moe.experts import route, run_experts


def test_weights_are_probabilities_of_the_chosen_experts() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0, -1.0], [3.0, 0.0, 0.0, 4.0]])
    weights, ids = route(scores, top_k=2, normalise=False)
    assert ids.tolist() == [[1, 2], [3, 0]]
    torch.testing.assert_close(weights, scores.softmax(-1).gather(1, ids))
    normal, _ = route(scores, top_k=2, normalise=True)
    torch.testing.assert_close(normal.sum(-1), torch.ones(2))


@pytest.mark.parametrize("tokens", [1, 2, 33])
def test_each_token_gets_the_weighted_sum_of_its_experts(tokens: int) -> None:
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 8, generator=random)
    gate_up = torch.randn(5, 12, 8, generator=random)
    down = torch.randn(5, 8, 6, generator=random)
    weights, ids = route(torch.randn(tokens, 5, generator=random), 3, True)
    want = torch.zeros(tokens, 8)
    for t in range(tokens):
        for weight, e in zip(weights[t], ids[t], strict=True):
            inner = F.silu(gate_up[e, :6] @ x[t]) * (gate_up[e, 6:] @ x[t])
            want[t] += weight * (down[e] @ inner)
    torch.testing.assert_close(run_experts(x, gate_up, down, weights, ids), want)
