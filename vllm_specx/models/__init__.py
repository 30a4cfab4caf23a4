"""Models that come with the product, and where their checkpoints are kept."""
