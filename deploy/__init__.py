"""Paceline on Kubernetes: the image, the manifests, and what checks them before they are applied."""
