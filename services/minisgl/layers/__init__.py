"""Operators that models are made of, split over tensor-parallel ranks."""
