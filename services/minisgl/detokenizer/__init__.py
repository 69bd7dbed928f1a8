"""Token ids to text, piece by piece, and the worker that does it for every request."""
