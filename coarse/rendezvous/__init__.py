"""The workers of a job find each other: what launchers tell, and the store where no framework brings one."""
