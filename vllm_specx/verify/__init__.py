"""The lossless mathematics of verification: the reference that tests compare with; no vLLM."""
