"""Training draft heads: prompts -> the target's own answers -> hidden states -> heads."""
