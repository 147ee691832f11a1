"""What developers of pagedkv run on its source; not part of the package."""
