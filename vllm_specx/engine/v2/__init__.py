"""The proposers on vLLM's Model Runner V2, whose speculators draft on the device."""
