"""Starts the processes of a job, lets them find each other, and ends them."""
