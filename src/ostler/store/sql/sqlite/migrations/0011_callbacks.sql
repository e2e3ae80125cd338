-- Which batch a job follows: looked up for the job's page.
CREATE INDEX batches_callback ON batches (callback_job) WHERE callback_job IS NOT NULL;
