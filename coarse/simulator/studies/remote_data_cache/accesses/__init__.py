"""Which pages and lines the document's workloads use."""
