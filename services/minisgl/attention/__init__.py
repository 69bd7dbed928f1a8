"""Paged attention behind one interface."""
