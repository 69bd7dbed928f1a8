"""The engine of a rank: computes the steps that the scheduler makes."""
