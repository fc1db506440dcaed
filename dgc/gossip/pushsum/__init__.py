"""Push-sum: SGP, OSGP and D-PSGD."""
