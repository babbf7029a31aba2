"""What Prometheus and Grafana are given."""
