"""Jobs: pipelines as processes that are watched, started again, stopped and found. Nothing here imports Spark."""
