//! Plots as SVG: lines over named places.

use plotters::prelude::*;

use super::report::{QUANTILES, Report, Throughput};
use crate::error::Failure;
use crate::topology::duration_text;
use crate::topology::spec::Guarantee;

const SIZE: (u32, u32) = (760, 380);
/// The names of the lines stand above the highest.
const LEGEND: f64 = 1.35;

/// A plot, with what it shows.
pub struct Plot {
    pub title: String,
    pub svg: String,
}

/// A line: its name, its colour, and a figure for each place where there is one.
struct Line {
    name: String,
    color: RGBColor,
    figures: Vec<Option<f64>>,
}

/// All plots for which there are figures.
pub fn plots(report: &Report) -> Result<Vec<Plot>, Failure> {
    let mut plots = Vec::new();
    let base = report.base;
    let intervals: Vec<&Throughput> =
        report.throughput.iter().filter(|t| (t.setting.size, t.setting.workers) == (base.size, base.workers)).collect();
    let places = distinct(intervals.iter().map(|t| (t.setting.interval, duration_text(t.setting.interval))));
    let at = |t: &Throughput, interval| t.setting.interval == interval;
    if places.len() > 1 {
        let shares = lines(&intervals, &places, at, |t| report.share(t).map(|share| share * 100.0));
        let title = "Throughput against at-least-once, in %, by commit interval";
        plots.push(draw(title, &names(&places), &shares)?);
        let rates = lines(&intervals, &places, at, |t| Some(t.rate() / 1000.0));
        plots.push(draw("Thousand records a second, by commit interval", &names(&places), &rates)?);
    }
    let sizes: Vec<&Throughput> = report
        .throughput
        .iter()
        .filter(|t| (t.setting.interval, t.setting.workers) == (base.interval, base.workers))
        .collect();
    let places = distinct(sizes.iter().map(|t| (t.record_bytes, format!("{} B", t.record_bytes))));
    if places.len() > 1 {
        let at = |t: &Throughput, bytes| t.record_bytes == bytes;
        let figures = lines(&sizes, &places, at, |t| Some(t.rate() * t.record_bytes as f64 / 1e6));
        plots.push(draw("MB of values a second, by size of a record", &names(&places), &figures)?);
    }
    let mut rates: Vec<u64> = report.latency.iter().map(|l| l.rate).collect();
    rates.dedup();
    for rate in rates {
        let own: Vec<_> = report.latency.iter().filter(|l| l.rate == rate).collect();
        let intervals = distinct(own.iter().map(|l| (l.interval, duration_text(l.interval))));
        for (interval, name) in intervals {
            let of_interval = own.iter().filter(|l| l.interval == interval);
            let figures: Vec<Line> = of_interval
                .map(|l| Line {
                    name: l.guarantee.as_str().to_owned(),
                    color: color(l.guarantee),
                    figures: l.quantiles.iter().copied().map(Some).collect(),
                })
                .collect();
            let title = format!("Milliseconds end to end at {rate} records/s, commits every {name}");
            plots.push(draw(&title, &QUANTILES.map(|(name, _)| name.to_owned()), &figures)?);
        }
    }
    Ok(plots)
}

/// Places in rising order, each once.
fn distinct<K: Ord>(places: impl Iterator<Item = (K, String)>) -> Vec<(K, String)> {
    let mut places: Vec<(K, String)> = places.collect();
    places.sort();
    places.dedup();
    places
}

fn names<K>(places: &[(K, String)]) -> Vec<String> {
    places.iter().map(|(_, name)| name.clone()).collect()
}

/// A line a guarantee.
fn lines<K: Copy>(
    all: &[&Throughput],
    places: &[(K, String)],
    at: impl Fn(&Throughput, K) -> bool,
    figure: impl Fn(&Throughput) -> Option<f64>,
) -> Vec<Line> {
    let guarantees = [Guarantee::ExactlyOnce, Guarantee::AtLeastOnce, Guarantee::AtMostOnce];
    let measured = guarantees.into_iter().filter(|guarantee| all.iter().any(|t| t.guarantee == *guarantee));
    let line = |guarantee: Guarantee| Line {
        name: guarantee.as_str().to_owned(),
        color: color(guarantee),
        figures: places
            .iter()
            .map(|(place, _)| all.iter().find(|t| t.guarantee == guarantee && at(t, *place)).and_then(|t| figure(t)))
            .collect(),
    };
    measured.map(line).collect()
}

fn color(guarantee: Guarantee) -> RGBColor {
    match guarantee {
        Guarantee::ExactlyOnce => RGBColor(21, 101, 192),
        Guarantee::AtLeastOnce => RGBColor(230, 81, 0),
        Guarantee::AtMostOnce => RGBColor(106, 27, 154),
    }
}

fn draw(title: &str, places: &[String], lines: &[Line]) -> Result<Plot, Failure> {
    let mut svg = String::new();
    onto(&mut svg, places, lines).map_err(|e| Failure::refused(format!("cannot draw a plot: {e}")))?;
    Ok(Plot { title: title.to_owned(), svg })
}

fn onto(svg: &mut String, places: &[String], lines: &[Line]) -> Result<(), Box<dyn std::error::Error>> {
    let highest = lines.iter().flat_map(|line| line.figures.iter().flatten()).fold(0.0_f64, |a, b| a.max(*b));
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let last = places.len().max(2) as i32 - 1;
    let mut chart = ChartBuilder::on(&area)
        .margin(12)
        .margin_right(28)
        .x_label_area_size(32)
        .y_label_area_size(56)
        .build_cartesian_2d(0..last, 0.0..highest.max(f64::MIN_POSITIVE) * LEGEND)?;
    let place = |at: &i32| places.get(*at as usize).cloned().unwrap_or_default();
    chart
        .configure_mesh()
        .x_labels(places.len())
        .x_label_formatter(&place)
        .y_label_formatter(&|figure| if highest < 10.0 { format!("{figure:.1}") } else { format!("{figure:.0}") })
        .light_line_style(WHITE)
        .draw()?;
    for line in lines {
        let points = || {
            let figures = line.figures.iter().enumerate();
            figures.filter_map(|(at, figure)| figure.map(|figure| (at as i32, figure)))
        };
        let color = line.color;
        chart
            .draw_series(LineSeries::new(points(), color.stroke_width(2)))?
            .label(&line.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
        chart.draw_series(points().map(|point| Circle::new(point, 3, color.filled())))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.85))
        .border_style(BLACK.mix(0.2))
        .draw()?;
    area.present()?;
    Ok(())
}
