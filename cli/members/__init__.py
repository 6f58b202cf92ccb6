"""``dpagent coordinator ca|invite|enrolment|devices``: who is a member of a fleet."""
