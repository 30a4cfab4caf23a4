"""Planning: what speculation is worth before anything is bought or served."""
