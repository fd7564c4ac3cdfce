//! Which columns make a record.
//!
//! # Invariants
//! `event_id`, `aggregate_id` and `payload` always have a column. A name is the catalog's, to the
//! byte: nothing is folded.

use std::collections::{BTreeMap, HashMap};

use super::route::Template;

/// What a column can be for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    EventId,
    AggregateType,
    AggregateId,
    EventType,
    Payload,
    Headers,
    Timestamp,
    Partition,
    /// The three that no record is made of: reports and, later, retention and healing read them.
    Id,
    CreatedAt,
    Xid,
}

impl Part {
    pub const ALL: [Part; 11] = [
        Part::EventId,
        Part::AggregateType,
        Part::AggregateId,
        Part::EventType,
        Part::Payload,
        Part::Headers,
        Part::Timestamp,
        Part::Partition,
        Part::Id,
        Part::CreatedAt,
        Part::Xid,
    ];

    /// The word in the settings, and the column's name in our own layout.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Part::EventId => "event_id",
            Part::AggregateType => "aggregate_type",
            Part::AggregateId => "aggregate_id",
            Part::EventType => "event_type",
            Part::Payload => "payload",
            Part::Headers => "headers",
            Part::Timestamp => "timestamp",
            Part::Partition => "partition",
            Part::Id => "id",
            Part::CreatedAt => "created_at",
            Part::Xid => "xid",
        }
    }

    #[must_use]
    pub fn parse(name: &str) -> Option<Part> {
        Part::ALL.into_iter().find(|part| part.name() == name)
    }

    /// Is there no record without it?
    #[must_use]
    pub fn is_required(self) -> bool {
        matches!(self, Part::EventId | Part::AggregateId | Part::Payload)
    }

    /// Is a record made of it, where it has a column?
    #[must_use]
    pub fn is_read(self) -> bool {
        !matches!(self, Part::Id | Part::CreatedAt | Part::Xid)
    }

    /// May the topic template name it? Then it stands for the column that it is mapped to.
    fn is_in_templates(self) -> bool {
        matches!(
            self,
            Part::EventId | Part::AggregateType | Part::AggregateId | Part::EventType
        )
    }
}

/// The column of each part that has one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Columns(BTreeMap<Part, String>);

/// Our own layout.
impl Default for Columns {
    fn default() -> Self {
        let without = |part: &Part| !matches!(part, Part::Timestamp | Part::Partition);
        let own = Part::ALL.into_iter().filter(without);
        Columns(own.map(|part| (part, part.name().to_owned())).collect())
    }
}

impl Columns {
    #[must_use]
    pub fn get(&self, part: Part) -> Option<&str> {
        self.0.get(&part).map(String::as_str)
    }

    pub fn set(&mut self, part: Part, column: String) {
        self.0.insert(part, column);
    }

    /// Says that the table has none. Of a part that is required nothing changes.
    pub fn unset(&mut self, part: Part) {
        if !part.is_required() {
            self.0.remove(&part);
        }
    }

    /// Every part that has a column.
    pub fn all(&self) -> impl Iterator<Item = (Part, &str)> {
        self.0.iter().map(|(part, column)| (*part, column.as_str()))
    }
}

/// Where a record's timestamp comes from, where no column is mapped to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Clock {
    /// When the transaction was committed.
    #[default]
    Commit,
    /// When the record is sent.
    Publish,
}

/// How a row becomes a record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mapping {
    pub columns: Columns,
    /// Over columns of the table: parts are replaced by theirs.
    pub topic: Template,
    /// What the template gives, and the topic that is meant by it.
    pub topics: HashMap<String, String>,
    /// (header, column): columns that become headers of their own.
    pub headers: Vec<(String, String)>,
    pub clock: Clock,
}

/// The topic template names a part that has no column.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the topic template {template:?} needs {part}, and there is no such column")]
pub struct TemplateLacks {
    pub template: String,
    pub part: &'static str,
}

impl Mapping {
    /// Sets the topic template; a part in it stands for its column.
    ///
    /// # Errors
    /// A part in it has no column.
    pub fn set_topic(&mut self, template: Template) -> Result<(), TemplateLacks> {
        let written = template.to_string();
        self.topic = template.over(|name| {
            let part = Part::parse(name).filter(|part| part.is_in_templates());
            match part {
                None => Ok(name.to_owned()),
                Some(part) => match self.columns.get(part) {
                    Some(column) => Ok(column.to_owned()),
                    None => Err(TemplateLacks {
                        template: written.clone(),
                        part: part.name(),
                    }),
                },
            }
        })?;
        Ok(())
    }

    /// The topic of every row, where the template has no columns.
    #[must_use]
    pub fn constant_topic(&self) -> Option<String> {
        let mut topic = String::new();
        let is_constant = self.topic.columns().next().is_none();
        let rendered = self
            .topic
            .render(std::iter::empty(), &self.topics, &mut topic);
        (is_constant && rendered.is_ok()).then_some(topic)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(text: &str) -> Template {
        Template::parse(text).expect("a template")
    }

    #[test]
    fn a_part_in_the_template_stands_for_its_column() {
        let mut mapping = Mapping::default();
        mapping.columns.set(Part::AggregateType, "Art".to_owned());
        let text = "{aggregate_type}.{tenant}.{event_type}";
        assert_eq!(mapping.set_topic(template(text)), Ok(()));
        let columns: Vec<&str> = mapping.topic.columns().collect();
        assert_eq!(columns, ["Art", "tenant", "event_type"]);
        assert_eq!(mapping.topic.to_string(), text);
    }

    #[test]
    fn a_template_over_a_part_without_a_column_is_refused() {
        let mut mapping = Mapping::default();
        mapping.columns.unset(Part::AggregateType);
        let error = mapping.set_topic(template("a.{aggregate_type}"));
        assert_eq!(error.expect_err("there is none").part, "aggregate_type");
        assert_eq!(mapping.set_topic(template("a.{kind}")), Ok(()));
    }

    #[test]
    fn what_every_record_has_cannot_be_left_out() {
        let mut columns = Columns::default();
        for part in Part::ALL {
            columns.unset(part);
        }
        let left: Vec<Part> = columns.all().map(|(part, _)| part).collect();
        assert_eq!(left, [Part::EventId, Part::AggregateId, Part::Payload]);
    }
}
