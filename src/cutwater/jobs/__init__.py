"""Runs pipelines as jobs: processes that are supervised, restarted, stopped and found by name.

``supervisor`` supervises one program, ``job_file`` stores what is known about a job, ``control`` takes commands. Not
here: the program itself (``spark.job``). Nothing in this folder imports Spark.
"""
