"""The choice of K: estimates, costs and rules. NumPy only; knows nothing of vLLM."""
