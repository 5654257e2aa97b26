"""Parameters, buffers and optimizer states that workers copy to each other."""
