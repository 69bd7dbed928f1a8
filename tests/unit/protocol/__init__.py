"""A model of the whole service in one thread: real cores, a bus that fails, and a virtual clock."""
