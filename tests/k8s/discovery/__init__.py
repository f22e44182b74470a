"""Discovery of workers in Kubernetes: a real API server, and a scripted one for what a real one does not do."""
