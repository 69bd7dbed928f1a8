"""A Kubernetes cluster of the tests' own: the API server alone, or one or two whole nodes.

    from tests.cluster.apiserver import ApiServer     # etcd + kube-apiserver, ready in 4 seconds
    from tests.cluster.cluster import Cluster         # nodes, DNS, ingress, images; needs root

`python -m tests.cluster up` and `down` are `make cluster-up` and `make cluster-down`.
"""
