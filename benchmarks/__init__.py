"""Comparisons on the real engine, and the prompts and scenarios they run."""
