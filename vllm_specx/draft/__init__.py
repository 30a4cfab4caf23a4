"""Proposers: torch and numpy only, no vLLM import, so that each can be tested alone."""
