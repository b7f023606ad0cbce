"""The command ``bagua``: a report of the installation, a doctor for clusters, a view of a job."""
