"""Draft-head checkpoints made on the spot, in FasterDecoding's layout."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file


def random_heads(folder: Path, hidden: int, heads: int = 4, spread: float = 0.05) -> str:
    """Residual blocks of random weights: their drafts are all but always wrong."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{head}.0.linear.weight": torch.randn(hidden, hidden, generator=generator) * spread
        for head in range(heads)
    }
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return str(folder)


def trained_heads(folder: Path, target: str, prompt: list[int], heads: int = 3) -> str:
    """Residual blocks that have learned what `target` says after `prompt` at temperature 0.7: their
    drafts are often right and often wrong."""
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    start = torch.tensor(prompt).repeat(256, 1)
    said = model.generate(
        start, do_sample=True, temperature=0.7, top_k=0, max_new_tokens=8, pad_token_id=0
    )
    with torch.inference_mode():
        states = model.model(said).last_hidden_state[:, len(prompt) - 1 :]
    states, said = states.clone(), said[:, len(prompt) - 1 :]
    tensors = {}
    for head in range(heads):
        # The state at t says token t + 1; head h says token t + 2 + h.
        inputs = states[:, : states.shape[1] - 2 - head].flatten(0, 1)
        wanted = said[:, 2 + head :].flatten()
        weight = torch.zeros(inputs.shape[1], inputs.shape[1], requires_grad=True)
        optimizer = torch.optim.Adam([weight], lr=1e-2)
        for _ in range(150):
            outputs = inputs + torch.nn.functional.silu(inputs @ weight.T)
            logits = outputs @ model.lm_head.weight.detach().T
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, wanted).backward()
            optimizer.step()
        tensors[f"{head}.0.linear.weight"] = weight.detach().clone()
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return str(folder)
