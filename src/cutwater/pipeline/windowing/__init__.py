"""Windows: how a pipeline describes them, their aggregates, and the operator that runs them."""
