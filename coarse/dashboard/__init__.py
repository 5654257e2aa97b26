"""The dashboard of a job: samples of its processes, a server on loopback, and the page that it serves."""
