"""The scheduler of a tensor-parallel rank: see scheduler.py for the loop, request.py for terms."""
