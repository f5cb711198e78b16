"""Jobs: pipelines as processes that are watched, started again, stopped and found.

``supervisor`` looks after one program, ``job_file`` keeps what is known of a job, ``control`` takes commands.
Not here: the program itself (``spark.job``). Nothing in this folder imports Spark.
"""
