"""AdamW over what is trained: the same numbers as torch's plain loop, norms not decayed."""

from __future__ import annotations

import torch
from torch import nn

from training.adamw import adamw


def model() -> nn.ModuleDict:
    torch.manual_seed(0)
    parts = {"embed_tokens": nn.Embedding(5, 4), "fc": nn.Linear(4, 4), "norm": nn.RMSNorm(4)}
    made = nn.ModuleDict(parts)
    made["embed_tokens"].weight.requires_grad_(False)
    return made


def test_fused_updates_equal_the_plain_loop() -> None:
    fused, plain = model(), model()
    ours = adamw(fused.named_parameters(), lr=0.01, betas=(0.9, 0.95))
    theirs = torch.optim.AdamW(
        [p for p in plain.parameters() if p.requires_grad],
        lr=0.01,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        foreach=False,
    )
    for step in range(3):
        for made, optimizer in ((fused, ours), (plain, theirs)):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            made["norm"](made["fc"](x)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert ours.defaults["fused"]
    for a, b in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.equal(fused["fc"].weight, model()["fc"].weight)


def test_only_trained_matrices_are_decayed() -> None:
    made = model()
    optimizer = adamw(made.named_parameters(), lr=0.01, weight_decay=0.1)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decay[id(made["fc"].weight)] == 0.1
    assert decay[id(made["fc"].bias)] == decay[id(made["norm"].weight)] == 0.0
    assert id(made["embed_tokens"].weight) not in decay
