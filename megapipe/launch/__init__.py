"""How the processes of a job start, meet, and end."""
