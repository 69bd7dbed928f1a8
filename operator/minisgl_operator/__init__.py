"""The operator: it makes a running service of each MiniSGLang object, and keeps it right.

The decisions are pure functions over data: `desired` (what children there should be), `plan` (what
to do about the difference) and `status` (what to report). Only `kube` and `bus` do input and
output; `reconcile` joins them, one task for each object.
"""
