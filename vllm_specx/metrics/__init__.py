"""What is measured while serving: its names, its counting, its export, dashboards and alert rules."""
