"""The dashboard of a job: samples of what its processes do, a server on loopback, and the page that it serves."""
