"""The decoder, its configuration, and the loading of its weights."""
