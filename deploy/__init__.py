"""What runs the services elsewhere. Nothing here is installed with the package."""
